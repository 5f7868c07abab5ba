# For `make test-exchange`: compiles llama.cpp in fewer units, and without the parts that its Python package does not load.
set(LLAMA_BUILD_COMMON OFF)
cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
