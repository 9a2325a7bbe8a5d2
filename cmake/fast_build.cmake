# Precompiled headers and unity builds. Parsing the headers of the standard library, of fmt or of
# GoogleTest takes longer than compiling most of our files. So it is done once for all files of a
# kind. Headers of this project are excluded: a change to one rebuilds the files that include it.
# Files still include what they use: LONGSPAN_FAST_BUILD=OFF compiles each by itself, as do the
# builds of the simulator, whose files have their own options.
set(LONGSPAN_STD_HEADERS <algorithm> <array> <atomic> <bit> <cerrno> <charconv> <chrono> <climits>
    <cmath> <condition_variable> <cstddef> <cstdint> <cstdio> <cstdlib> <cstring> <exception>
    <functional> <initializer_list> <iterator> <limits> <memory> <mutex> <new> <numeric> <optional>
    <span> <sstream> <string> <string_view> <system_error> <thread> <tuple> <type_traits> <utility>
    <vector> <fmt/format.h>)

# ccache keeps results with precompiled headers only where it is told that their text decides, not
# their time, and where GCC reports which of them it read.
if(LONGSPAN_FAST_BUILD AND CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
                                  ${CMAKE_CXX_COMPILER_LAUNCHER})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()

# longspan_precompiled(name OPTIONS ... LIBRARIES ... HEADERS ...): a target that holds the headers,
# for targets with the same options and definitions; PROGRAM: for programs, whose code has -fPIE.
function(longspan_precompiled name)
  if(NOT LONGSPAN_FAST_BUILD)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg PROGRAM "" "OPTIONS;LIBRARIES;HEADERS")
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp CONTENT "" @ONLY)
  add_library(${name} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES})
  target_compile_options(${name} PRIVATE ${arg_OPTIONS})
  if(arg_PROGRAM)
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
  endif()
  list(TRANSFORM arg_HEADERS REPLACE "(.+)" "$<$<COMPILE_LANGUAGE:CXX>:\\1>")
  target_precompile_headers(${name} PRIVATE ${arg_HEADERS})
endfunction()

# longspan_compile_together(target n): the target's sources are compiled n at a time.
function(longspan_compile_together target n)
  if(LONGSPAN_FAST_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${n})
  endif()
endfunction()

# longspan_use_precompiled(target name): the files of the target see the headers of `name`.
function(longspan_use_precompiled target name)
  if(TARGET ${name})
    target_precompile_headers(${target} REUSE_FROM ${name})
  endif()
endfunction()
