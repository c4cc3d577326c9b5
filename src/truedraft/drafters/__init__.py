"""Drafters: who guesses. One file per method; `truedraft methods` lists them."""
