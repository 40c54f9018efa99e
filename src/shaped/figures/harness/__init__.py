"""What computes, keeps, checks, draws and reports the pages."""
