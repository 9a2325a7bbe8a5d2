# Read by ctest, for every test: a test neither reads the user's machine constants nor saves any, so
# that they change no result, and no test changes them. This place cannot be a folder: saving there
# is an error. A test that saves names its own folder.
set(ENV{XDG_CONFIG_HOME} /dev/null)
unset(ENV{LONGSPAN_MACHINE})
# Laws draw the same cases in every run, unless new ones are requested (tests/support/fresh_seed.hpp).
if(NOT "$ENV{LONGSPAN_TEST_SEEDS}" STREQUAL "new" AND NOT DEFINED ENV{RC_PARAMS})
  set(ENV{RC_PARAMS} seed=20260101)
endif()
