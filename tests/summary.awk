# What ctest does not say of programs with many tests, from the log of its last run (Testing/Temporary/LastTest.log): which tests failed, and
# how many were skipped in each program and why.

function end_of_program() {
  # A test that began and did not end: the program crashed in it or was stopped.
  if (test != "") failed[++failures] = entry ": " test " did not end"
  test = ""
}

# An entry begins: "12/180 Testing: NAME".
/^[0-9]+\/[0-9]+ Testing: / {
  end_of_program()
  entry = $3
  next
}

/^\[ RUN      \] / {
  test = $4
  reason = "no reason is given"
  next
}

says_reason {
  reason = $0 == "" ? reason : $0
  says_reason = 0
  next
}

/: Skipped$/ { says_reason = 1 }

/^\[       OK \] / { test = "" }

/^\[  SKIPPED \] / && $4 == test {
  key = entry ": " reason
  if (!(key in skipped)) order[++kinds] = key
  skipped[key]++
  skips++
  test = ""
}

/^\[  FAILED  \] / {
  name = $4
  sub(/,$/, "", name)  # its parameter follows
  if (name == test) {
    failed[++failures] = entry ": " test
    test = ""
  }
}

END {
  end_of_program()
  if (skips > 0) {
    printf "\nSkipped: %d tests\n", skips
    for (i = 1; i <= kinds; ++i) printf "%6d  %s\n", skipped[order[i]], order[i]
  }
  if (failures > 0) {
    printf "\nFailed: %d tests\n", failures
    for (i = 1; i <= failures; ++i) printf "  %s\n", failed[i]
  }
}
