"""Reading batch files. Light to import: some of the modules are started as processes of their own.

- ``lines`` cuts a file of any size into lines of bounded length.
- ``seen_ids`` remembers any number of ids in bounded memory.
- ``request_line`` says what is wrong with one line, or what it asks for.
- ``surrogates`` mends text that was cut in UTF-16.
- ``model_names`` says whether a line's model is served.
- ``check_file`` is the process that checks a whole file, or finds the id of a line.
- ``prefix_order`` is the process that puts lines in the order of their ``prefix_key``.
"""
