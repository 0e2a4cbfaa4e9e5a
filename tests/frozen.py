"""Imported last by what processes are forked from: nothing that was imported is looked at by their garbage collectors."""

import gc

gc.collect()
gc.freeze()
