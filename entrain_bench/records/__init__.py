"""What runs leave: metrics, records and their keys, tables, and views of them."""
