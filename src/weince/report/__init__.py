"""The page of a diagnosis: what is measured, the verdict, figures, tables, and the HTML around them."""
