"""Documents, segments and calls: reading CCNet, e(c) and e(c, r), splicing calls into texts and taking them out."""
