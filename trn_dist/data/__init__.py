"""Text to BERT pre-training shards, and shards to batches.

The modules in the order in which data goes through them: `text` (files to documents of sentences), `vocabulary`
(WordPiece), `instances` (masked sentence pairs), `shards` (HDF5 files on disk), `prepare` (all of it, over processes),
`sampler` (the order of samples) and `loader` (batches). Import the module that you need: this package loads none.
"""
