# longspan_mpi_test(name target ranks...): one test `name.npN` per rank count, labelled dist. Ranks
# may outnumber cores, and root may run them, as in a container.
set(LONGSPAN_MPI_TEST_ENV
    OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    OMPI_MCA_btl_vader_single_copy_mechanism=none LONGSPAN_THREADS=1)
if(LONGSPAN_SANITIZE MATCHES "address")  # Open MPI leaks its own memory, in modules that are unloaded
  list(APPEND LONGSPAN_MPI_TEST_ENV ASAN_OPTIONS=detect_leaks=0)  # by the time of the report
endif()

# A limit that only a hang reaches; under a sanitizer the work takes ten times as long.
set(LONGSPAN_RANKS_TIMEOUT 240)
if(LONGSPAN_SANITIZE)
  set(LONGSPAN_RANKS_TIMEOUT 900)
endif()

# Tests have tiers. Tests without a tier's label are those that every change needs (./test.sh). CI also
# runs those with the label `more` (./test.sh all); those with the label `long` run before a release
# (tests/long.sh).
#
# longspan_tier_of_ranks(ranks variable): two and three ranks find most errors. Seven ranks on fewer
# cores take minutes, and few tests have found anything there that four do not.
function(longspan_tier_of_ranks ranks variable)
  set(${variable} "" PARENT_SCOPE)
  if(ranks EQUAL 1 OR ranks EQUAL 4)
    set(${variable} more PARENT_SCOPE)
  elseif(ranks GREATER 4)
    set(${variable} long PARENT_SCOPE)
  endif()
endfunction()

# longspan_mostly_waits(test ranks lock): most of the test's time is spent waiting for deadlines, so
# it does not need a core for each rank. Tests with the same lock run one at a time.
function(longspan_mostly_waits test ranks lock)
  set(cores 1)
  if(ranks GREATER 4)
    set(cores 2)
  endif()
  set_tests_properties(${test} PROPERTIES PROCESSORS ${cores} RESOURCE_LOCK "${lock}")
endfunction()

function(longspan_mpi_test name target)
  if(NOT LONGSPAN_BUILD_TESTS)
    return()
  endif()
  foreach(ranks IN LISTS ARGN)
    add_test(NAME ${name}.np${ranks}
             COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS}
                     $<TARGET_FILE:${target}> ${MPIEXEC_POSTFLAGS})
    set_tests_properties(${name}.np${ranks} PROPERTIES
      TIMEOUT ${LONGSPAN_RANKS_TIMEOUT} PROCESSORS ${ranks} SKIP_RETURN_CODE 77
      ENVIRONMENT "${LONGSPAN_MPI_TEST_ENV}")
    longspan_tier_of_ranks(${ranks} tier)
    set_tests_properties(${name}.np${ranks} PROPERTIES LABELS "dist;${tier}")
  endforeach()
endfunction()
