# SPDX-License-Identifier: Apache-2.0
# Writes what is installed next to the command and made from its own words: a manual page for `lockstep` and each of its commands, from
# their --help, and completion scripts.
#   cmake -DLOCKSTEP=build/bin/lockstep -DVERSION=0.1.0 -DFOLDER=build/generated/share -P cmake/manual_pages.cmake
foreach(name LOCKSTEP VERSION FOLDER)
  if(NOT ${name})
    message(FATAL_ERROR "manual_pages.cmake: ${name} is not set")
  endif()
endforeach()

function(output_of variable)
  execute_process(COMMAND ${LOCKSTEP} ${ARGN} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# As it stands, where a dot or an apostrophe at the beginning of a line would be a request of roff and a hyphen might be typeset.
function(escaped variable text)
  string(REPLACE "\\" "\\e" text "${text}")
  string(REPLACE "-" "\\-" text "${text}")
  string(REGEX REPLACE "(^|\n)([.'])" "\\1\\\\&\\2" text "${text}")
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# Help texts are set for a terminal; so they stay.
function(write_page name summary help also)
  escaped(title "${name}")
  escaped(summary "${summary}")
  escaped(help "${help}")
  escaped(also "${also}")
  file(WRITE ${FOLDER}/man/man1/${name}.1 ".TH ${name} 1 \"\" \"lockstep ${VERSION}\" \"User Commands\"
.SH NAME
${title} \\- ${summary}
.SH DESCRIPTION
.nf
${help}.fi
.SH SEE ALSO
${also}
")
endfunction()

output_of(help --help)
string(REGEX REPLACE "^[^\n]*\n\n" "" body "${help}")  # the name and the version stand in the page's head
string(REPLACE ";" "," listed "${help}")  # a semicolon would cut an element of CMake's lists
string(REGEX MATCHALL "\n  [a-z]+ +[^\n]+" lines "${listed}")
set(pages "")
foreach(line IN LISTS lines)
  string(REGEX MATCH "^\n  ([a-z]+) +(.*)$" line "${line}")
  set(command ${CMAKE_MATCH_1})
  set(summary "${CMAKE_MATCH_2}")
  output_of(text ${command} --help)
  # Verbs of a command stand in its usage.
  string(REGEX MATCHALL "(Usage:|\n      ) lockstep ${command} [a-z]+" verbs "${text}")
  list(REMOVE_DUPLICATES verbs)
  foreach(verb IN LISTS verbs)
    string(REGEX REPLACE ".* " "" verb "${verb}")
    output_of(part ${command} ${verb} --help)
    if(NOT part STREQUAL text)
      string(APPEND text "\nlockstep ${command} ${verb}:\n\n${part}")
    endif()
  endforeach()
  write_page(lockstep-${command} "${summary}" "${text}" "lockstep(1)")
  list(APPEND pages "lockstep-${command}(1)")
endforeach()
if(NOT pages)
  message(FATAL_ERROR "manual_pages.cmake: ${LOCKSTEP} --help names no commands")
endif()
list(JOIN pages ", " pages)
write_page(lockstep "distributed training for C++ programs that use libtorch" "${body}" "${pages}")

foreach(script bash-completion/completions/lockstep zsh/site-functions/_lockstep fish/vendor_completions.d/lockstep.fish)
  string(REGEX MATCH "^[a-z]+" shell ${script})
  output_of(text --completion ${shell})
  file(WRITE ${FOLDER}/${script} "${text}")
endforeach()
