"""Who trains together: process groups, joining, replicas, weights."""
