"""Reading batch files. Light to import: one of the modules is started as a process of its own.

- ``lines`` cuts a file of any size into lines of bounded length.
- ``seen_ids`` remembers any number of ids in bounded memory.
- ``request_line`` says what is wrong with one line, or what it asks for.
- ``check_file`` is the process that checks a whole file.
"""
