"""trn_dist"""
