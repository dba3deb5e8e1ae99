// A file without a name that another process of this host opens: it is found among the open files of
// the process that has it. Nothing can stay behind of it, whichever process is killed.
#pragma once

#include <string>
#include <string_view>

#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/rendezvous/socket.h"

namespace ebb::shared {

// What others have to be told of this process's `file`.
std::string TellFile(int file);

// The file that `owner` has told of. Not open if it cannot be had: a container hides processes from
// each other, or `owner`'s process id means another process here.
Descriptor OpenPeerFile(const Participant& owner, std::string_view told, int flags);

}  // namespace ebb::shared
