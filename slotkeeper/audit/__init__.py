"""audit: what people, and programs for them, have done.

    acts         made by who asks, noted in the transaction of what they change
    search       acts, found and exported
    protected    the database itself refuses to change them

The record's core knows none of them: it is handed a note, and writes it beside what it changes.
"""
