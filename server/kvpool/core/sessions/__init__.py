"""Sessions: leases, requests with their block tables, quarantine."""
