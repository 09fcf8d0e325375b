"""``cadenza watch``: a cluster seen with an ordinary user's rights, and the part that sharing could play there."""
