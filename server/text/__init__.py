"""Tokens and text: templates, tokenizing, detokenizing. It knows no engine and no HTTP."""
