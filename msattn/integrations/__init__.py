"""Adapters: they rename, build batches and call the stages; nothing else imports them."""
