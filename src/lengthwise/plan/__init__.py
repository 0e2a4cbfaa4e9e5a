"""Planning: which ranks compute which sequences of a step, and with which parallel configuration."""
