"""The S3 dialect: what a request asks for, and how it is answered, in S3's words.

What does not belong here: signatures (`cache/auth`), where bytes lie and how they are fetched.
"""
