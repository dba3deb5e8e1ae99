# The code of a Markdown page: the blocks whose fence says `kind`, one after the other. With lines=1 every other line
# becomes an empty one, so that the compiler's line numbers are the page's.
/^```/ {
  if (inside || wanted) {
    inside = wanted = 0
  } else {
    wanted = substr($0, 4) == kind
    inside = 1
    if (lines) print ""
    next
  }
}
wanted && !/^```/ { print; next }
lines { print "" }
