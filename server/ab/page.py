from __future__ import annotations


def page(result):
    return ""
