# cmake -DPROGRAM=file -DHAS=regex -DLACKS=regex -P libraries.cmake: the shared libraries that the
# program loads, by ldd. HAS shows that ldd sees anything.
execute_process(COMMAND ldd ${PROGRAM} OUTPUT_VARIABLE libraries COMMAND_ERROR_IS_FATAL ANY)
if(HAS AND NOT libraries MATCHES "${HAS}")
  message(FATAL_ERROR "${PROGRAM} loads no library like '${HAS}':\n${libraries}")
endif()
if(LACKS AND libraries MATCHES "${LACKS}")
  message(FATAL_ERROR "${PROGRAM} loads '${CMAKE_MATCH_0}', and should not:\n${libraries}")
endif()
