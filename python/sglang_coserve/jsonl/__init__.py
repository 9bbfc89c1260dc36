"""Reading batch files. Light to import: some of the modules are started as processes of their own.

- ``lines`` cuts a file of any size into lines of bounded length, remembers their ids, and puts them
  in the order of their ``prefix_key``.
- ``request_line`` says what is wrong with one line, or what it asks for, and of which model.
- ``body_limits`` says how much a request may be, and mends text that was cut in UTF-16.
- ``check_file`` is the process that checks a whole file, or finds the id of a line.
"""
