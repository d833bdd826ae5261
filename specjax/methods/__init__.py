"""Methods as data: what each needs, how it is built, and which one is the fastest here."""
