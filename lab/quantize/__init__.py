"""`turnout quantize`: a smaller checkpoint of a model, in a format that other engines load too."""
