"""Who is in the fleet: a static list, a shared folder, or leases in etcd."""
