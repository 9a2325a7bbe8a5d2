# Read by ctest, for every test: a test neither reads the user's machine constants nor saves any, so
# that they change no result, and no test changes them. In this place there can be no folder: what is
# saved there is an error. A test that saves names a folder of its own.
set(ENV{XDG_CONFIG_HOME} /dev/null)
unset(ENV{LONGSPAN_MACHINE})
