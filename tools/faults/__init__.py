"""The fault campaign: what is acknowledged is kept, bit for bit, whatever fails and whoever dies."""
