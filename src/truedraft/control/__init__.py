"""Controls: how much is drafted and verified, from measured costs and acceptance history. One file per control."""
