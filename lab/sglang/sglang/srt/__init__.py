"""Where the real package keeps its server; here only the list of its flags."""
