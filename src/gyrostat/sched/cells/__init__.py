"""HiveD's cells: tenants share a cluster, and each has at any time what it would have alone.

`file` reads the YAML file and keeps its lines; `spec` says what is wrong with it and makes a `CellSpec`. `allocator` holds the
cluster's state: `CellCluster`. It decides within a virtual cluster first (`plan`, `virtual`, on trees of `forest`), which
nobody else can influence, and then binds virtual cells to physical ones (`free_lists`, `physical`). `request` is what goes in
and comes out, `fairness` divides what is left over, `shortfall` says who has too little, `bindings` is what outlives a crash.
"""
