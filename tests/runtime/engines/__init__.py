"""One suite for every engine behind `flashrec.runtime.engine.Engine`, run with each that the installed torch offers."""
