"""The master's HTTP control API: `port` is what a master offers, `router` answers requests with it, `connection`
speaks HTTP/1.1 on one socket.

What does not belong here: any decision about the job (the machine's), and the stream of the agents (the master's).
"""
