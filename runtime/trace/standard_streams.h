// Descriptors 0, 1 and 2. A program may be started without them (`gpt >&-`). The next file that it
// opens would then take the lowest of them, and printed or logged lines would end up in that file.
#pragma once

namespace ebb {

// For the first line of main, before there are threads. Descriptors that are not open become
// /dev/null, also for programs that this one starts. If there is no /dev/null, writes to them fail.
void OpenMissingStandardStreams();

// For files that a library opens, because its program may not call the function above. Returns the
// owned `descriptor` if it is at least 3, otherwise another one in its place, closed on exec. -1
// stays -1. If no descriptor is left it closes `descriptor` and returns -1 with errno.
int AboveStandardStreams(int descriptor);

}  // namespace ebb
