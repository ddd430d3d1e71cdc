"""Buckets of blobs: what is pushed is kept, and given to who asks for it. There is no origin to ask."""
