"""Imported last by what processes are forked from: their garbage collections leave alone what was imported."""

import gc

gc.collect()
gc.freeze()
