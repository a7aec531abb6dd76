"""What this package really does: everything that SGLang's users see from outside."""
