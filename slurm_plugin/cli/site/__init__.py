"""Commands about a site's configuration."""
