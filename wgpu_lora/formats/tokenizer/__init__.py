"""Texts and conversations to token ids and labels, by untrusted tokenizers and chat templates in a child process.

chat_template, tokenizer_json -> local_tokenizer -> tokenizer_process -> tokenizer     text to tokens and back
examples, reasoning, template_trace -> conversation_rows -> label_mask                 examples to ids and labels
label_mask -> tokenizer_child                                                          the child process
"""
