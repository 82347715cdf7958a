"""Alpaca: conversations to fine-tune on."""
