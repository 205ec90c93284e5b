"""Workers that train together: process groups, joining, replicas, weights."""
