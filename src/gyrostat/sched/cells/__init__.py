"""HiveD's cells: tenants share a cluster, and each can at any time place what it could place in a private cluster.

`file` reads the YAML file and records line numbers, `load` checks it and makes a `CellSpec` (`spec`). `allocator` has the
cluster's state: `CellCluster`. It places a request in the tenant's virtual cluster first (`plan`, `virtual`, on trees of
`forest`), which other tenants cannot affect, and then binds virtual cells to physical ones (`free_lists`, `physical`).
`request` has requests and grants, `fairness` and `lending` divide idle devices among opportunistic jobs, `shortfall` finds
the tenants whose cells do not fit on healthy devices, `bindings` is the state that is stored and restored.
"""
