"""From counts to devices: `nodes` (one pool, with or without quotas), `private` (a cluster per VC), `cells` (HiveD's)."""
