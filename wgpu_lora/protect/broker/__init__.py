"""The broker: holds the data key, and releases it to trainers whose evidence passes the policy."""
