"""Model files of other formats, written anew as Hugging Face folders. Found by the file's suffix, each through an entry
point of the group `turnout.formats`."""
