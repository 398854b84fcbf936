"""The public calls: validation, dispatch, registration with torch."""
