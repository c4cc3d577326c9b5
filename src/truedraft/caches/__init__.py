"""The keys and values of rows of different lengths: appended, kept along a path, cropped, released."""
