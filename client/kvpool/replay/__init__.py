"""Workloads and what plays them: public traces and generated chats, one by one or by concurrent schedulers."""
