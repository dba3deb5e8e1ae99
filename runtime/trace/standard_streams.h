// Descriptors 0, 1 and 2, without which a program may be started (`gpt >&-`). The next file that is opened then
// takes the lowest of them, and what is printed or logged ends up in it.
#pragma once

namespace ebb {

// For the first line of main, before there are threads: those that are not open become /dev/null, for programs
// that this one starts, too. Where there is no /dev/null they become what fails to be written.
void OpenMissingStandardStreams();

// For the files of a library, as its program may not have done so: the owned `descriptor` from 3 on, so another
// one, closed on exec, if it is 0, 1 or 2. -1 stays -1; -1 with errno if there are no more descriptors, and
// then `descriptor` is closed.
int AboveStandardStreams(int descriptor);

}  // namespace ebb
