"""Measurements that only a claim needs. They lie apart from the lessons, so that no lesson's record depends on them."""
