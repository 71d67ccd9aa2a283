"""``msattn bench``: every stage and the whole layer, beside what else is installed."""
